"""One Ray for all tests of this folder: on the loopback interface, without dashboard, and gone afterwards."""

import os
import secrets
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def ray_environment(tmp_path_factory):
    """What Ray's processes inherit."""
    folder = tmp_path_factory.mktemp("ray")
    token = folder / "token"
    token.write_text(secrets.token_hex(16))
    token.chmod(0o600)
    changed = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TUNE_GLOBAL_CHECKPOINT_S": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH")])
        ),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changed.items():
            patch.setenv(name, value)
        yield folder


@pytest.fixture(scope="session")
def one_ray(ray_environment):
    """Ends whatever Ray this process has at the end."""
    import ray  # noqa: PLC0415 - takes seconds
    from ray._private import services  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as patch:
        # Ray takes the machine's own address for 127.0.0.1.
        patch.setattr(services, "resolve_ip_for_localhost", lambda host: host)
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module")
def ray_cluster(one_ray):
    """A Ray of one node and two CPUs, for all files that want one."""
    if not one_ray.is_initialized():
        one_ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
        )
    return one_ray
