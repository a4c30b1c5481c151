"""One engine on several hosts: a process on each in one jax.distributed job, plans over gRPC, tensors over the
accelerators' own links. docs/hosts.md tells the whole of it."""
