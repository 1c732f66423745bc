"""A plugin of pytest for notebooks that run side by side: no two workers give a kernel the same port."""

import os

from jupyter_client.connect import LocalPortCache

workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
free_port = LocalPortCache.find_available_port


def own_port(self, ip: str) -> int:
    while (port := free_port(self, ip)) // 2 % workers != worker:  # Linux may hand out even ports alone
        self.return_port(port)
    return port


LocalPortCache.find_available_port = own_port
