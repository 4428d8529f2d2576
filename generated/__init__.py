"""The library: kernels with passports, one folder per task, and the index that finds the best one."""

from .library import Library, LibraryError, Passport

__all__ = ["Library", "LibraryError", "Passport"]
