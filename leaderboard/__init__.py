"""Results, comparisons and reports."""
