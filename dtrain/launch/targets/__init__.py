"""Where runs are launched: this machine, hosts over ssh, SLURM, GKE, SkyPilot."""
