"""From a run to the page: live reports, notices, the store and its routes."""
