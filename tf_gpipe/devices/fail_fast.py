"""What TensorFlow's connections to workers read in the environment.

This module imports neither TensorFlow nor Keras, which a worker does without.
"""

import os

# How long TensorFlow may try to connect again.
RECONNECT_SECONDS = 3


def fail_fast() -> None:
    """Makes TensorFlow tell of a worker that is gone, and not wait for it.

    Call it before TensorFlow connects. Left to itself, TensorFlow waits for
    ever for a worker that has ended to come back. Variables of the environment
    that are set stay as they are.
    """
    os.environ.setdefault("GRPC_FAIL_FAST", "true")
    # Operations go to a worker on a stream, which waits whatever it is told.
    os.environ.setdefault("TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "false")
    # How long it tries to connect again, and holds up what asks meanwhile.
    option, options = "grpc.min_reconnect_backoff_ms", "TF_GRPC_DEFAULT_OPTIONS"
    given = os.environ.get(options)
    if option not in (given or ""):
        added = f"{option}={1000 * RECONNECT_SECONDS}"
        os.environ[options] = f"{given},{added}" if given else added
