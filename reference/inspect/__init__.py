"""Looking into a training step: statistics, the choice of precision, anomalies, recorded steps."""
