"""The command line. Importing it loads neither torch nor the C++ core."""
