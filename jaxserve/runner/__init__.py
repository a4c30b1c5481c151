"""An iteration on the devices: the batch, the programs that stages compile and run, and what they hold between runs.

`batch` packs a plan; `programs` is what is computed, `lowering` what is compiled of it and `layout` for which sizes;
`stage` runs the layers of one sub-mesh and `pipeline` the stages in a row.
"""
