"""The red team: known exploits that must be rejected for the right reason, and honest kernels that must pass.

``cases/*.yaml`` hold the exploits as data; ``attacks`` holds those that are
actions rather than kernel files; ``runner`` says which stage noticed what.
"""
