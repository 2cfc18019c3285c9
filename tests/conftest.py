"""For all tests."""

from __future__ import annotations

import os
import signal

# Tests send Ctrl-C to programs, which would not hear it where a shell has started the tests in the background.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Unbuffered, a print is several writes, and those of two workers mix.
os.environ.pop("PYTHONUNBUFFERED", None)
