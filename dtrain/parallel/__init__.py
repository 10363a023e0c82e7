"""Parallelism: the mesh, the rules that shard parameters over it, the engines, and distributed start-up."""
