"""One module per command of `meshrl`, named as the command is and imported when it runs."""
