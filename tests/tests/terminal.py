"""Runs a program in a terminal of 120 columns until it shows all words (the first argument, separated by commas;
single words, because existing blanks are not written), presses `q`, and checks that it exits with 0 and leaves the
alternate screen."""

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time

words, *program = sys.argv[1:]
pid, terminal = pty.fork()
if pid == 0:
    os.environ["TERM"] = "xterm-256color"
    os.execv(program[0], program)
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 45, 120, 0, 0))
shown, wanted = b"", [it.encode() for it in words.split(",")]
end, is_shown = time.time() + 30, False
while time.time() < end:
    if not select.select([terminal], [], [], 0.5)[0]:
        continue
    try:
        shown += os.read(terminal, 65536)
    except OSError:
        break
    if not is_shown and all(it in shown for it in wanted):
        os.write(terminal, b"q")
        is_shown = True
if not is_shown:
    os.kill(pid, 9)
_, status = os.waitpid(pid, 0)
assert is_shown, shown
assert os.waitstatus_to_exitcode(status) == 0, status
assert b"\x1b[?1049h" in shown and b"\x1b[?1049l" in shown, shown[-200:]
