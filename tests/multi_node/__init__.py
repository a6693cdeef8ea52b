"""Jobs whose machines have a store each: here, directories of one machine stand for them."""
