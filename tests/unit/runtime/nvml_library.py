"""Stand in for NVIDIA's library: four GPUs, two a NUMA node; the second has less memory than the others."""

GIB = 2**30


class NvmlLibrary:
    """Answer as the library does. `fails` names a function that returns an error."""

    def __init__(self, fails=""):
        self._fails = fails

    def __getattr__(self, function):
        return lambda *arguments: 999 if function == self._fails else getattr(self, f"_{function}")(*arguments)

    def _nvmlInit_v2(self):
        return 0

    def _nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 4
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index, device):
        device._obj.value = index + 1
        return 0

    def _nvmlDeviceGetMemoryInfo(self, device, memory):
        memory._obj[:] = [(40 if device.value == 2 else 80) * GIB, 7, 9]
        return 0

    def _nvmlDeviceGetName(self, device, name, size):
        name.value = f"GPU {device.value}".encode()
        return 0

    def _nvmlDeviceGetCpuAffinity(self, device, num_words, words):
        words[0], words[1] = (0xFF, 1) if device.value <= 2 else (0xFF00, 0)  # core 64 is of the first node, too
        return 0
