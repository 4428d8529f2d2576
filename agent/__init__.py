"""Authors, the run loop and the command line."""
