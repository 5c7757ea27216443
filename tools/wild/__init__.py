"""The wild report: the loss code of public trainers, as it stands in a folder of clones, under the doctor."""
