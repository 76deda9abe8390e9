"""Starts Python programs that find TensorFlow and Keras imported.

To import both takes five seconds of a core. Put `*quick_python.command()` in
place of `sys.executable`, and a program starts in a tenth of a second: in a
child of a process that has imported them, and waits.

    launcher ──── arguments, environment, files 0 to 2 ───> server
       ^                                                      │ fork
       └────────── exit status, or number of a signal ──── monitor
                                                              │ fork
                                                           program

The program has its own arguments, environment, working directory and files. But
these modules are imported, and some of `tests` and `tools`; and NumPy's random
state is the same each time. The launcher passes on Ctrl-C, SIGTERM and SIGHUP,
and ends as the program does. Where it is killed, so is the program, a moment
later. Its process id, limits and process group are not the program's.

Where the server has ended, or the program has other environment variables of
TensorFlow or Keras, the launcher becomes an ordinary Python.
"""

# The launcher imports nothing else, to start quickly.
import contextlib
import os
import signal
import socket
import sys

_SERVE = "--serve"
_ACCEPTED = b"+"
_MOST = 2**20  # Bytes of a request.
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Prefixes of variables that libraries may read when they are imported.
_READ = ("CUDA_", "KERAS_", "KMP_", "OMP_", "PYTHON", "TF_", "XLA_")


def command():
    """Returns the arguments that start Python, and starts the server once."""
    global _started
    if _started is None:
        _started = _start()
    return _started


_started = None


def _start():
    if sys.platform != "linux":
        return (sys.executable,)
    import atexit
    import subprocess

    from tools import child_process

    with _socket() as listening:
        # An address that the system chooses, and that no file belongs to.
        listening.bind("")
        listening.listen()
        address = listening.getsockname()[1:].decode()
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.quick_python", _SERVE],
            cwd=os.path.dirname(os.path.dirname(__file__)),
            stdin=listening.fileno(),
            preexec_fn=child_process.end_with_parent,
        )

    def end():
        server.kill()
        server.wait()

    atexit.register(end)
    return sys.executable, "-I", "-S", __file__, address


def _socket(fileno=None):
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=fileno)


def _launch(address, *args):
    """Has the server run a program, and ends as it does."""
    request = repr((args, os.getcwd(), dict(os.environ))).encode()
    with _socket() as server:
        accepted = False
        with contextlib.suppress(OSError):
            server.connect("\0" + address)
            socket.send_fds(server, [request], [0, 1, 2])
            accepted = server.recv(1) == _ACCEPTED
        if accepted:
            _follow(server)
    os.execv(sys.executable, [sys.executable, *args])


def _follow(server):
    """Starts the program, passes on signals, and ends as it does."""

    def pass_on(number, frame):
        # The program may just have ended.
        with contextlib.suppress(OSError):
            server.send(bytes([number]))

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    server.send(_ACCEPTED)
    status = int(server.recv(64) or -signal.SIGKILL)
    if status < 0:
        if -status in _PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _serve():
    """Forks a process for each request; in that process, runs its program."""
    import ast
    import gc

    # Before TensorFlow adds some.
    ours = _relevant(os.environ)
    import keras  # noqa: F401

    # Programs leave these objects alone, and the memory that they share.
    gc.collect()
    gc.freeze()
    # The system reaps the monitors.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listening = _socket(os.dup(0))
    while True:
        launcher, _ = listening.accept()
        request, files = b"", []
        with contextlib.suppress(OSError):
            request, files, *_ = socket.recv_fds(launcher, _MOST, 3)
        if request:
            args, folder, environment = ast.literal_eval(request.decode())
            # Else it is refused: the connection is closed.
            if _relevant(environment) == ours and not _fork():
                listening.close()
                _monitor(launcher)
                break
        launcher.close()
        for file in files:
            os.close(file)
    for i, file in enumerate(files):
        os.dup2(file, i)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _run(args)


def _fork():
    """Returns 0 in a new process, and `True` where there is none."""
    try:
        return os.fork()
    except OSError:
        return True


def _relevant(environment):
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ) and name != "PYTHONPATH"
    }


def _monitor(launcher):
    """Forks once more: returns in the program alone, which it watches."""
    import select

    from tools import child_process

    child_process.end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answer = b""
    with contextlib.suppress(OSError):
        launcher.send(_ACCEPTED)
        answer = launcher.recv(1)
    if answer != _ACCEPTED:
        os._exit(0)  # The launcher has ended.
    program = os.fork()
    if not program:
        launcher.close()
        child_process.end_with_parent()
        return
    ended = os.pidfd_open(program)
    while True:
        ready, _, _ = select.select([ended, launcher], [], [])
        if ended in ready:
            break
        os.kill(program, (launcher.recv(1) or bytes([signal.SIGKILL]))[0])
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(OSError):
        launcher.send(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _run(args):
    """Runs a program as Python does that is started with these arguments."""
    import runpy

    import __main__

    sys.orig_argv[:] = sys.executable, *args
    kind, *rest = args
    # The first path is that of `python -m`, the folder of the tests.
    added = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if kind == "-c":
        code, *rest = rest
        first, sys.argv[:] = "", [kind, *rest]
    elif kind == "-m":
        first, sys.argv[:] = os.getcwd(), rest
    else:
        first, sys.argv[:] = os.path.dirname(os.path.abspath(kind)), args
    sys.path[:1] = [first, *added]
    if kind == "-c":
        for name in set(vars(__main__)) - {"__builtins__"}:
            delattr(__main__, name)
        __main__.__name__ = "__main__"
        exec(compile(code, "<string>", "exec"), vars(__main__))
    elif kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:] == [_SERVE]:
        _serve()
    else:
        _launch(*sys.argv[1:])
