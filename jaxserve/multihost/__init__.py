"""One engine on several hosts: one jax.distributed job, plans over gRPC (docs/hosts.md)."""
