"""`meshrl report` and `meshrl plot`: what a run came to, as a page, as pictures, on a terminal."""
