"""What engines with a stock server behind them share: slots, versions, answers, the server's process, its files."""
