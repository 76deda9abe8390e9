"""Settings that end calls of dead workers; `faults_test` kills workers."""

import os
from unittest import mock

from absl.testing import absltest

from tf_gpipe.devices import fail_fast


class FailFastTest(absltest.TestCase):
    def test_what_the_user_has_set_stays(self):
        given = {
            "GRPC_FAIL_FAST": "use_caller",
            "TF_GRPC_DEFAULT_OPTIONS": "grpc.lb_policy_name=x",
        }
        with mock.patch.dict(os.environ, given):
            os.environ.pop("TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", None)
            for _ in range(2):
                fail_fast.fail_fast()
            self.assertEqual(os.environ["GRPC_FAIL_FAST"], "use_caller")
            self.assertEqual(
                os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"], "false"
            )
            self.assertEqual(
                os.environ["TF_GRPC_DEFAULT_OPTIONS"],
                "grpc.lb_policy_name=x,grpc.min_reconnect_backoff_ms="
                f"{1000 * fail_fast.RECONNECT_SECONDS},"
                "grpc.enable_http_proxy=0",
            )


if __name__ == "__main__":
    absltest.main()
