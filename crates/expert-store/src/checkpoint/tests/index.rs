//! The weight map: paths stay inside, names are unique, everything else is refused with a reason.

use super::*;

fn read(text: &str) -> Result<Index, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors.index.json");
    std::fs::write(&path, text).unwrap();
    Index::read(&path).map_err(|e| e.to_string())
}

#[test]
fn files_come_sorted_with_their_names() {
    let index = read(
        r#"{"metadata":{"total_size":1.5e3,"x":[1,{}]},"weight_map":{"b":"z.safetensors","a":"sub/y.safetensors","c":"z.safetensors"}}"#,
    )
    .unwrap();
    assert_eq!(index.files, ["sub/y.safetensors", "z.safetensors"]);
    assert_eq!(index.names[0], [xxh3_128(b"a")]);
    assert_eq!(index.names[1].len(), 2);
}

#[test]
fn bad_indexes_are_refused_with_a_reason() {
    for (text, want) in [
        (r#"{"weight_map":{"a":"../x.safetensors"}}"#, "not inside"),
        (
            r#"{"weight_map":{"a":"b/../../x.safetensors"}}"#,
            "not inside",
        ),
        (r#"{"weight_map":{"a":"/etc/passwd"}}"#, "not inside"),
        (r#"{"weight_map":{"a":"./x.safetensors"}}"#, "not inside"),
        (r#"{"weight_map":{"a":""}}"#, "not inside"),
        (
            r#"{"weight_map":{"a":"x\n.safetensors"}}"#,
            "control characters",
        ),
        (r#"{"weight_map":{"a":"x","a":"y"}}"#, "\"a\" twice"),
        (r#"{"weight_map":{"a":"x","a":"x"}}"#, "\"a\" twice"),
        (r#"{"weight_map":{}}"#, "lists no tensors"),
        (r#"{"weight_map":{"a":1}}"#, "cannot be read"),
        (r#"{"weight_map":[]}"#, "cannot be read"),
        (r#"{"metadata":{}}"#, "no weight_map"),
        (
            r#"{"weight_map":{"a":"x"},"weight_map":{"b":"y"}}"#,
            "twice",
        ),
        (r#"{"weight_map":{"a":"x"}} trailing"#, "cannot be read"),
        ("", "cannot be read"),
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "LFS pointer",
        ),
    ] {
        let why = read(text).expect_err(text);
        assert!(why.contains(want), "{text}: {why}");
    }
}

#[test]
fn repeats_are_found_in_one_list_and_across_lists() {
    assert_eq!(first_repeat(&[vec![1, 2], vec![3]]), None);
    assert_eq!(first_repeat(&[vec![1, 2], vec![2, 3]]), Some((2, 0, 1)));
    assert_eq!(first_repeat(&[vec![1], vec![2, 2]]), Some((2, 1, 1)));
}
