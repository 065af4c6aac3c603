import pytest

from luce_core.bench.energy import Absent, Energy, Meter, open_meter


class FakeNvml:
    """Two GPUs whose counters run at 100 and 50 W of the test's own clock."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, watts=(100.0, 50.0), broken=None):
        self.now = 0.0
        self.watts = list(watts)
        self.millijoules = [5_000_000.0] * len(self.watts)
        self.broken = broken or set()

    def _call(self, name):
        if name in self.broken:
            raise self.NVMLError(f"{name} is not supported")

    def pass_time(self, seconds, extra_w=0.0):
        self.now += seconds
        for place, watts in enumerate(self.watts):
            self.millijoules[place] += 1e3 * seconds * (watts + extra_w)

    def nvmlInit(self):
        self._call("init")

    def nvmlDeviceGetCount(self):
        return len(self.watts)

    def nvmlDeviceGetHandleByIndex(self, place):
        return place

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._call("uuid")
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self._call("energy")
        return int(self.millijoules[handle])


def test_the_idle_power_is_taken_off():
    nvml = FakeNvml()
    meter = open_meter(lambda: nvml, clock=lambda: nvml.now)
    meter.watch_idle(sleep=nvml.pass_time, seconds=2.0)
    assert meter.idle_w == pytest.approx(150.0)
    meter.start()
    nvml.pass_time(4.0, extra_w=200.0)
    used = meter.stop()
    assert used.gross_j == pytest.approx(4 * 550)
    assert used.net_j == pytest.approx(4 * 400)
    assert used.per_token(800) == pytest.approx(2.0)


def test_one_gpu_is_found_by_its_uuid():
    nvml = FakeNvml()
    meter = open_meter(lambda: nvml, "GPU-1", clock=lambda: nvml.now)
    meter.start()
    nvml.pass_time(2.0)
    assert meter.stop().gross_j == pytest.approx(100.0)


def test_stretches_add_up():
    both = Energy(10.0, 2.0, 1.0) + Energy(20.0, 3.0, 1.0)
    assert (both.gross_j, both.seconds, both.net_j) == (30.0, 5.0, 25.0)


def no_module():
    raise ImportError("No module named 'pynvml'")


@pytest.mark.parametrize(
    ("load", "uuid", "said"),
    [
        (no_module, None, "luce-core[energy]"),
        (lambda: FakeNvml(broken={"init"}), None, "init is not supported"),
        (lambda: FakeNvml(broken={"energy"}), None, "energy is not supported"),
        (lambda: FakeNvml(broken={"uuid"}), "GPU-0", "uuid is not supported"),
        (lambda: FakeNvml(watts=()), None, "no GPU"),
    ],
)
def test_without_nvml_energy_is_absent_with_its_reason(load, uuid, said):
    found = open_meter(load, uuid)
    assert isinstance(found, Absent)
    assert said in found.reason


def test_a_meter_is_a_meter():
    assert isinstance(open_meter(FakeNvml), Meter)
