//! The lines that the README and the quick start give their readers, run as they stand between two network namespaces:
//! from programs that are built to a verified fetch.

use atlas_expert_tests::walkthrough::{Namespaces, Page, walk};
use serde_json::Value;

/// What a page promises, seen by a program: all records, each chunk of them compared, and the store's digest.
fn assert_verified(report: &str, digest: &str) {
    let report: Value = serde_json::from_str(report).unwrap_or_else(|e| panic!("{e}: {report}"));
    assert_eq!(report["records"], 32, "{report:#}");
    assert_eq!(report["verified"], true, "{report:#}");
    for name in ["failed", "verify_failures", "takeovers"] {
        assert_eq!(report[name], 0, "{name}: {report:#}");
    }
    assert_eq!(report["payload_digest"], digest, "{report:#}");
}

/// Runs a page, and checks by `fetch` on the client what came against what `verify` on the peer reads from its disk.
fn run(page: &str, fetch: &str, store: &str) -> Result<(), String> {
    let page = Page::read(page)?;
    let namespaces = Namespaces::new()?;
    let [peer, client] = namespaces.machines()?;
    let values = [("PEER_ADDR", Namespaces::ADDR)];
    let walked = walk(&page, "ethernet", &values, &peer, &client)?;
    let digest = walked.digest()?;
    assert_verified(&client.run(&format!("{fetch} --json -q"))?, digest);
    let read = peer.run(&format!("atlas-expert verify --digest {store} -q"))?;
    assert!(
        read.contains(&format!("payload-digest: {digest}")),
        "{read}"
    );
    Ok(())
}

#[test]
fn lines_of_the_readme_lead_to_a_verified_fetch() {
    let fetch = "atlas-expert fetch --expert-peer $PEER_ADDR:9909 --auth-token-file ~/peer.token";
    run("README.md", fetch, "target/toy.store").unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn lines_of_the_quick_start_lead_to_a_verified_fetch() {
    let page = "docs/quickstart-two-machines.md";
    run(page, "atlas-expert fetch", "toy.store").unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn line_that_fails_or_shows_something_else_fails_the_page() {
    let namespaces = Namespaces::new().unwrap_or_else(|e| panic!("{e}"));
    let [peer, client] = namespaces.machines().unwrap_or_else(|e| panic!("{e}"));
    let run = |text: &str| {
        let page = Page::parse("page", text)?;
        walk(&page, "ethernet", &[], &peer, &client)
    };
    let good = "```sh client\nWORD=here\ncd target\n```\n```sh client\necho $WORD $PWD\n```\n";
    let walked = run(good).unwrap_or_else(|e| panic!("{e}"));
    assert!(walked.client.starts_with("here /"), "{walked:?}");
    assert!(walked.client.ends_with("/target\n"), "{walked:?}");
    for (text, place) in [
        // In the middle of a block, and of a pipe.
        ("```sh client\nfalse\ntrue\n```", "page:1"),
        (
            "```sh client\ntrue\n```\n```sh peer\nfalse | true\n```",
            "page:4",
        ),
        ("```sh client\natlas-expert fetsh\n```", "page:1"),
        // Not installed: its folder is another one's here.
        ("```sh client\natlas-expert --version\n```", "page:1"),
        ("```sh peer serve\necho started\n```", "page:1"),
        ("```sh client\necho a\n```\n```text shown\nb\n```", "page:1"),
    ] {
        let error = run(text).expect_err(text);
        assert!(error.contains(place), "{text}: {error}");
    }
}
