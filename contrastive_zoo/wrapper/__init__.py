"""DistributedLoss and what stands around it: one step, third-party losses, averaged gradients, GradCache."""
