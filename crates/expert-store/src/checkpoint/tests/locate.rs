//! Names of parts. What is found in folders is tested through `open`.

use super::*;

#[test]
fn part_names_are_split_and_others_are_not() {
    let part = Part::of_name("m-v1-00002-of-00003.gguf", ".gguf").unwrap();
    assert_eq!((&*part.prefix, part.number, part.of), ("m-v1", 2, 3));
    assert_eq!(part.name_of(3, ".gguf"), "m-v1-00003-of-00003.gguf");
    for name in [
        "m.gguf",
        "m-2-of-3.gguf",
        "m-00004-of-00003.gguf",
        "m-00000-of-00003.gguf",
        "m-00001-of-00001.bin",
        "-of-.gguf",
        "m-0000x-of-00003.gguf",
    ] {
        assert_eq!(Part::of_name(name, ".gguf"), None, "{name}");
    }
}
