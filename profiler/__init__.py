"""Times chunks and collectives, and describes the hardware they run on."""
