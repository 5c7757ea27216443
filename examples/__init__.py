"""One script per trainer: ten steps on several processes that end where one process ends."""
