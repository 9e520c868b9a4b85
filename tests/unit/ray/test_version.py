"""A directory takes no pool of another version, and says so."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from hydra_tune_ray.node.nodes import DeviceNode
from hydra_tune_ray.node.pool_directory import DirectoryOptions, PoolDirectory
from hydra_tune_ray.version import VERSION

NODE = DeviceNode(node_id="0123456789", devices="cpu:1", num_gpus=0, num_devices=1)


def remote(value):
    """A method of an actor that returns this."""

    async def called(*args):
        return value

    return SimpleNamespace(remote=called)


def opened(**methods):
    directory = PoolDirectory(DirectoryOptions(name="pools", options={}, start_seconds=1.0, idle_seconds=None))
    return asyncio.run(directory._opened(NODE, SimpleNamespace(call=remote("is opened"), **methods)))


@pytest.mark.parametrize(
    ("methods", "version"), [({"version": remote("hydra-tune 99")}, "hydra-tune 99"), ({}, "an earlier hydra-tune")]
)
def test_a_pool_of_another_version_is_refused(methods, version):
    text = opened(**methods)
    assert (
        text
        == f"the pool on node 01234567 runs {version}, and its directory {VERSION}; install the same hydra-tune on all nodes"
    )


def test_a_pool_of_the_same_version_is_opened():
    assert opened(version=remote(VERSION)) == "is opened"
