"""Speed, measured beside a hand-written floor and beside the peers that are installed."""
