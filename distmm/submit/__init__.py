"""Batch jobs: one job file, rendered, submitted and followed on this machine, Slurm or Kubernetes."""
