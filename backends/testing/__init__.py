"""What the tests of several backends share: no backend's own tests, and nothing that is installed."""
