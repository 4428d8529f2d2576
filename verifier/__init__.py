"""Check (no GPU) and measure (GPU): every stage turns a candidate into a verdict with a reason."""
