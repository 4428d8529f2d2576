"""Review of proposed kernels: what a reviewer sees, whether the evidence still holds, and the decision."""
