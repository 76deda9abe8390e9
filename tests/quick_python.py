"""Starts Python programs that find TensorFlow and Keras imported.

To import both takes five seconds of a core. Put `*quick_python.command()` in
place of `sys.executable`, and a program starts in a tenth of a second: in a
child of a process that has imported them, and waits.

    launcher ──── arguments, environment, files 0 to 2 ───> server
       ^                                                      │ fork
       └────────── exit status, or number of a signal ──── monitor
                                                              │ fork
                                                           program

The program finds all as in a new process, but for modules that have been
imported. The launcher passes on signals and ends as the program does. Where it
is killed, so is the program. If the program has other environment variables of
TensorFlow or Keras than the server, the launcher becomes an ordinary Python.
"""

# The launcher imports nothing else, to start quickly.
import contextlib
import os
import signal
import socket
import sys

_SERVE = "--serve"
_ACCEPTED, _REFUSED = b"+", b"-"
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
    import tempfile

    from tools import child_process

    folder = tempfile.TemporaryDirectory()
    path = os.path.join(folder.name, "socket")
    with _socket() as listening:
        listening.bind(path)
        listening.listen()
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.quick_python", _SERVE],
            cwd=os.path.dirname(os.path.dirname(__file__)),
            stdin=listening.fileno(),
            preexec_fn=child_process.end_with_parent,
        )

    def end():
        server.kill()
        server.wait()
        folder.cleanup()

    atexit.register(end)
    return sys.executable, "-I", "-S", __file__, path


def _socket(fileno=None):
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=fileno)


def _launch(path, *args):
    """Has the server run a program, and ends as it does."""
    environment = dict(os.environ)
    with _socket() as server:
        server.connect(path)
        request = repr((args, os.getcwd(), environment)).encode()
        socket.send_fds(server, [request], [0, 1, 2])
        if server.recv(1) != _ACCEPTED:
            os.execv(sys.executable, [sys.executable, *args])
        for number in _PASSED_ON:
            signal.signal(number, lambda n, frame: server.send(bytes([n])))
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
        request, files, *_ = socket.recv_fds(launcher, _MOST, 3)
        if request:
            args, folder, environment = ast.literal_eval(request.decode())
            if _relevant(environment) != ours:
                launcher.send(_REFUSED)
            elif not os.fork():
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
    program = os.fork()
    if not program:
        launcher.close()
        child_process.end_with_parent()
        return
    ended = os.pidfd_open(program)
    launcher.send(_ACCEPTED)
    while True:
        ready, _, _ = select.select([ended, launcher], [], [])
        if ended in ready:
            break
        os.kill(program, (launcher.recv(1) or bytes([signal.SIGKILL]))[0])
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(BrokenPipeError):
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
