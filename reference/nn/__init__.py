"""The layers, written once for both sides: they call the ops of namespace `twin`, and the device decides."""
