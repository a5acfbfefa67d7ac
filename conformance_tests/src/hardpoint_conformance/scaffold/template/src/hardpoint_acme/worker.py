"""One rank on the device: the core's worker, with what differs on the device."""

from hardpoint.worker import TorchWorker


class AcmeWorker(TorchWorker):
    """The core's worker as it is; `TorchWorker` says which hooks a device may need, such as `_synchronize`."""
