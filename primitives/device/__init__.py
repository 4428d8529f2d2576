"""Lowering to CuTeDSL: everything that imports cutlass or quack lives below here."""
