"""Training of draft modules: the data, the run, its figures.

Each main ends with one line, or none, where Ctrl-C stops it: `spd_jax.commandline.run` sees to it
once its imports are done. They take a second or more, and an interrupt raised in the midst of one
ends in a traceback, so until then Ctrl-C ends the process as it does one that is not Python.
"""

import signal
import sys

# Only where `python -m` is about to run one of them: it names the module once it has imported this.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
