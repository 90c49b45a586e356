"""Datasets in LeRobot's formats v2.0, v2.1 and v3.0, read with pyarrow and av."""
