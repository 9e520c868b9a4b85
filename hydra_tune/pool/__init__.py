"""The running pool: carries out the scheduler's commands on real devices, with a worker thread for each device."""
