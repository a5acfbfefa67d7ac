"""What must hold on a real device: the memory engine over a vendor's driver, with nothing injected or peeked at.

The tests use only what a real driver offers. `HARDPOINT_DEVICE=<backend>:<index>` runs them on that device, as `make device-check` does;
without it they run on the CPU and on the simulated drivers, which shows that the tests work and proves nothing about hardware.
"""
