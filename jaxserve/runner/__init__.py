"""Runs iterations on the devices.

`layout` decides what each stage holds, `batch` packs a plan, `programs` has the traced functions, `lowering` lowers
them, `stage` runs the layers of one sub-mesh, and `pipeline` runs the stages in order.
"""
