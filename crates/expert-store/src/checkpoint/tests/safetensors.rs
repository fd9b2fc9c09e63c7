//! One header: what is refused, and that the reference reader agrees.

use super::*;
use proptest::prelude::*;

fn refused(header: &str, data_bytes: u64) -> String {
    parse(header.as_bytes(), data_bytes)
        .and_then(|h| name_hashes(&h))
        .expect_err(header)
}

fn tensor(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{begin},{end}]}}"#)
}

#[test]
fn sound_headers_are_read_whatever_their_order_and_padding() {
    let a = tensor("a", "BF16", "2,3", 4, 16);
    let b = tensor("b", "F32", "", 0, 4);
    let z = tensor("z", "U8", "0,7", 4, 4);
    let text = format!(r#"{{"__metadata__":{{"format":"pt"}},{a},{z},{b}}}     "#);
    let header = parse(text.as_bytes(), 16).unwrap();
    let names: Vec<&str> = header.tensors.iter().map(|t| &*t.name).collect();
    assert_eq!(names, ["b", "z", "a"]);
    assert_eq!(name_hashes(&header).unwrap().len(), 3);
    assert!(parse(b"{}", 0).unwrap().tensors.is_empty());
    assert!(parse(br#"{"__metadata__":null}"#, 0).is_ok());
}

#[test]
fn every_damage_is_named() {
    let u8s = |name: &str, begin: u64, end: u64| {
        tensor(name, "U8", &(end - begin).to_string(), begin, end)
    };
    let of = |parts: &[String]| format!("{{{}}}", parts.join(","));
    let cases = [
        (of(&[u8s("a", 0, 4), u8s("b", 6, 8)]), 8, "leaves a gap"),
        (of(&[u8s("a", 1, 4)]), 4, "leaves a gap"),
        (of(&[u8s("a", 0, 4), u8s("b", 2, 8)]), 8, "overlaps"),
        (
            of(&[tensor("a", "U8", "4", 4, 0)]),
            4,
            "ends before it begins",
        ),
        (of(&[u8s("a", 0, 4)]), 3, "cut off"),
        (of(&[u8s("a", 0, 4)]), 5, "damaged"),
        (of(&[tensor("a", "BF16", "4", 0, 4)]), 4, "does not make"),
        (of(&[tensor("a", "F4", "3", 0, 1)]), 1, "does not make"),
        (
            of(&[tensor("a", "U8", "4294967296,4294967296", 0, 0)]),
            0,
            "does not make",
        ),
        (
            of(&[tensor("a", "F7", "4", 0, 4)]),
            4,
            "unknown variant `F7`",
        ),
        (of(&[tensor("a", "U8", "-1", 0, 4)]), 4, "cannot be read"),
        (
            of(&[u8s("a", 0, 4), tensor("a", "U8", "0", 4, 4)]),
            4,
            "\"a\" is in the header twice",
        ),
        (
            of(&[u8s("a", 0, 4), tensor("\\u0061", "U8", "0", 4, 4)]),
            4,
            "\"a\" is in the header twice",
        ),
        (
            r#"{"__metadata__":{},"__metadata__":{}}"#.into(),
            0,
            "twice",
        ),
        (r#"{"__metadata__":{"a":1}}"#.into(), 0, "cannot be read"),
        (
            r#"{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}"#.into(),
            1,
            "duplicate field",
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[]}}"#.into(),
            1,
            "missing field",
        ),
        ("[]".into(), 0, "not a JSON object"),
        (" {}".into(), 0, "not a JSON object"),
        (String::new(), 0, "not a JSON object"),
        ("{} x".into(), 0, "cannot be read"),
        ("{".repeat(500), 0, "cannot be read"),
    ];
    for (header, data_bytes, want) in cases {
        let why = refused(&header, data_bytes);
        assert!(why.contains(want), "{header}: {why}");
    }
    assert!(parse(b"{\"\xff\":1}", 0).unwrap_err().contains("UTF-8"));
}

/// What the reference reader says of the same bytes.
fn reference(header: &[u8], data_bytes: u64) -> bool {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header);
    file.resize(file.len() + data_bytes as usize, 0);
    safetensors::SafeTensors::read_metadata(&file).is_ok()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn mutated_headers_are_judged_as_the_reference_judges_them(
        changes in prop::collection::vec((0usize..400, prop::sample::select(b"0123456789{}[],:\"abU8F432_ \\".to_vec())), 0..3),
        data in prop::sample::select(vec![16u64, 16, 16, 15, 17, 160]),
    ) {
        let a = tensor("a", "BF16", "2,3", 4, 16);
        let b = tensor("b", "F32", "", 0, 4);
        let mut text = format!(r#"{{"__metadata__":{{"f":"pt"}},{a},{b}}}"#).into_bytes();
        let n = text.len();
        for (at, value) in changes {
            text[at % n] = value;
        }
        let ours = parse(&text, data);
        let theirs = reference(&text, data);
        match ours {
            // The reference keeps the last of two equal names, and takes leading white space.
            Ok(h) if name_hashes(&h).is_ok() => prop_assert!(theirs, "{}", String::from_utf8_lossy(&text)),
            Ok(_) => {}
            Err(e) => prop_assert!(
                !theirs || e.contains("not a JSON object") || e.contains("twice"),
                "{}: {}", String::from_utf8_lossy(&text), e
            ),
        }
    }

    #[test]
    fn random_bytes_are_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), data in any::<u64>()) {
        let _ = parse(&bytes, data);
        let mut text = b"{".to_vec();
        text.extend_from_slice(&bytes);
        let _ = parse(&text, data);
    }
}
