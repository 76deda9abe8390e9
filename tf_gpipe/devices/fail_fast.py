"""Environment variables of TensorFlow's connections to workers.

This module imports neither TensorFlow nor Keras: the variables are set before
TensorFlow is imported, and a worker never imports Keras.
"""

import os

# The time between TensorFlow's attempts to connect again.
RECONNECT_SECONDS = 3
_OPTIONS = "TF_GRPC_DEFAULT_OPTIONS"


def fail_fast() -> None:
    """Makes calls to a lost worker fail, where TensorFlow would wait for ever.

    It also makes TensorFlow connect to workers directly, whatever proxy the
    environment names for HTTP. Call it before TensorFlow connects. Environment
    variables and options that the user has set are left as they are.
    """
    os.environ.setdefault("GRPC_FAIL_FAST", "true")
    # By default eager operations go to a worker on a stream, which ignores
    # GRPC_FAIL_FAST and waits.
    os.environ.setdefault("TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "false")
    given = os.environ.get(_OPTIONS, "")
    added = [
        # Requests wait while gRPC tries to connect again.
        ("grpc.min_reconnect_backoff_ms", 1000 * RECONNECT_SECONDS),
        ("grpc.enable_http_proxy", 0),
    ]
    os.environ[_OPTIONS] = ",".join(
        [given] * bool(given)
        + [f"{name}={value}" for name, value in added if name not in given]
    )
