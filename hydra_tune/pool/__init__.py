"""The running pool: carries out the scheduler's commands on real devices, one worker thread each."""
