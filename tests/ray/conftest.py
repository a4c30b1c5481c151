from importlib.util import find_spec

# What these tests need is installed by `make test-scale` only.
collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]
