//! The README's chapter on clusters, done as it says.

use std::process::Stdio;
use std::time::Duration;

use fake_discord::FakeDiscord;
use tokio::process::Command;
use tokio::time::timeout;

use crate::town::Town;
use crate::unlimited;

const README: &str = include_str!("../../README.md");

/// The commands of a chapter, in order.
fn commands(chapter: &str) -> String {
    let text = README.split("\n## ").find(|text| text.starts_with(chapter)).unwrap();
    let blocks = text.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    blocks.collect()
}

/// Whether nothing may be skipped for want of a tool.
#[allow(clippy::disallowed_methods, reason = "no setting of the proxy")]
fn must_have_tools() -> bool {
    std::env::var_os("CI").is_some()
}

#[tokio::test(flavor = "multi_thread")]
#[allow(clippy::disallowed_methods, reason = "where tools are is no setting of the proxy")]
async fn its_commands_make_certificates_and_run_three_nodes() {
    let tools = ["openssl", "curl"].map(|tool| std::process::Command::new(tool).arg("--version").output().is_ok());
    if tools.contains(&false) {
        assert!(!must_have_tools(), "openssl and curl are needed");
        eprintln!("SKIPPED: openssl and curl are needed");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let discord = FakeDiscord::start(unlimited()).await;
    let binary = std::path::Path::new(env!("CARGO_BIN_EXE_nirn-proxy"));
    // Addresses that no other run uses: the ports are the usual ones.
    let network = format!("127.{}.50.", std::process::id() % 150 + 64);
    let script = commands("Clusters").replace("127.0.0.", &network);
    let mut shell = Command::new("sh");
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&folders).chain([binary.parent().unwrap().into()]);
    let path = std::env::join_paths(folders).unwrap();
    shell
        .arg("-ec")
        .arg(format!("trap 'trap : TERM; kill 0; wait' EXIT\n{script}"))
        .current_dir(folder.path())
        .env_clear()
        .env("PATH", path)
        .env("DISCORD_API_URL", discord.url())
        .stdin(Stdio::null())
        // The nodes end with their shell.
        .process_group(0)
        .kill_on_drop(true);
    let output = timeout(Duration::from_secs(60), shell.output()).await.unwrap().unwrap();
    let (told, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{told}\n{errors}");
    assert_eq!(told.matches("nirn_proxy_cluster_members 3\n").count(), 3, "{told}\n{errors}");
    assert_eq!(discord.counts().arrivals, 1, "{told}\n{errors}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kubernetes_example_makes_certificates_that_a_node_takes() {
    let town = Town::new(unlimited()).await;
    let one = town.node(1).await;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let manifest = include_str!("../../docs/kubernetes.yaml");
    let (_, script) = manifest.split_once("args:\n            - |\n").unwrap();
    let script: Vec<_> = script.lines().map_while(|line| line.strip_prefix("              ")).collect();
    // The pod's folders.
    let script = script.join("\n").replace("/tls/", &format!("{}/", folder.path().display()));
    let script = script.replace("/ca/", &format!("{}/ca-", folder.path().display()));
    town.ca.write(&at("ca-ca.pem"), &at("ca-ca.key"));
    let mut shell = Command::new("sh");
    let ip = town.ip(3).to_string();
    shell.arg("-euc").arg(script).env("POD_IP", &ip).env("NODE_NAME", "node-3");
    let output = match shell.output().await.unwrap() {
        output if output.status.code() == Some(127) => return assert!(!must_have_tools(), "openssl is needed"),
        output => output,
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let files = [("CLUSTER_CA_FILE", "ca.crt"), ("CLUSTER_CERT_FILE", "tls.crt"), ("CLUSTER_KEY_FILE", "tls.key")];
    for (variable, name) in files {
        assert!(manifest.contains(&format!("{{ name: {variable}, value: /tls/{name} }}")), "{variable}");
    }
    let files = files.map(|(variable, name)| (variable, at(name).to_string_lossy().into_owned()));
    let files = files.each_ref().map(|(variable, path)| (*variable, path.as_str()));
    let three = town.node_with(3, &files).await;
    for node in [&one, &three] {
        node.sees(2.0).await;
    }
}
