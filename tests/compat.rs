//! Bots written with real libraries, at the real binary, in front of a Discord that enforces its limits.
//!
//! The libraries come from their registries, at the versions `tests/compat/` pins, into a folder under `target`. Where that
//! is not possible the tests say so and pass, unless `CI` is set.
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use fake_discord::{Arrival, FakeDiscord, Reply, Rule, Script};
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};
use tokio::sync::Mutex;
use tokio::time::timeout;

/// One test at a time: interpreters that start take all of a small machine.
static MACHINE: Mutex<()> = Mutex::const_new(());

const TOKEN: &str = "MTAwMDAwMDAwMDAwMDAwMDAx.Gcompat.the-token-that-discord-knows";
const WRONG_TOKEN: &str = "MTAwMDAwMDAwMDAwMDAwMDAy.Gcompat.a-token-that-discord-does-not-know";
/// `interaction:` and some more, in base64.
const INTERACTION_TOKEN: &str = "aW50ZXJhY3Rpb246NjAwMDAwMDAwMDAwMDAwMDAxOmNvbXBhdA";
const SHARED_CHANNEL: &str = "220000000000000000";

/// A Discord that knows one token. Typing in a channel is allowed once in ten seconds, and the channel that all processes
/// share takes five messages in five.
async fn discord() -> FakeDiscord {
    let mut script = Script { believable: true, tokens: Some(vec![TOKEN.to_owned()]), ..Script::default() };
    script.rules.push(Rule::window("POST /channels/{}/typing", "typing", 1, Duration::from_secs(10)));
    let shared = format!("POST /channels/{SHARED_CHANNEL}/messages");
    script.rules.push(Rule::window(&shared, "shared-channel", 5, Duration::from_secs(5)));
    let discord = FakeDiscord::start(script).await;
    let unknown = json!({"message": "Unknown Message", "code": 10008});
    discord.always("GET", "/channels/{}/messages/100000000000000404", Reply::json(404, &unknown));
    let forbidden = json!({"message": "Missing Permissions", "code": 50013});
    discord.always("GET", "/guilds/{}/bans", Reply::json(403, &forbidden));
    discord
}

/// The binary in front of a Discord; killed when dropped.
struct Proxy {
    api: String,
    process: Child,
}

impl Proxy {
    async fn start(discord: &FakeDiscord, settings: &[(&str, &str)]) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let process = Command::new(env!("CARGO_BIN_EXE_nirn-proxy"))
            .env_clear()
            .env("BIND_IP", "127.0.0.1")
            .env("PORT", port.to_string())
            .env("DISCORD_API_URL", discord.url())
            .env("ENABLE_METRICS", "false")
            .envs(settings.iter().copied())
            .current_dir(env!("CARGO_TARGET_TMPDIR"))
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let listening = async {
            while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), listening).await.expect("the proxy listens");
        Self { api: format!("http://127.0.0.1:{port}/api"), process }
    }
}

/// The folder of this test's clients in the repository.
fn clients() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compat")
}

/// A folder under `target` for one language's libraries.
fn installed(language: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("compat").join(language)
}

/// discord.js, or `None` if this test has to be skipped.
fn node() -> Option<&'static Path> {
    static NODE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let install = || {
        let folder = installed("node");
        fs::create_dir_all(&folder).unwrap();
        // Modules are looked for from where the importing file lies.
        for name in ["package.json", "package-lock.json", "library.mjs", "storm.mjs"] {
            fs::copy(clients().join(name), folder.join(name)).unwrap();
        }
        let stamp = [clients().join("package.json"), clients().join("package-lock.json")];
        once(&folder, &stamp, || run("npm", &["ci", "--no-audit", "--no-fund", "--ignore-scripts"], &folder))?;
        Some(folder)
    };
    NODE.get_or_init(install).as_deref()
}

/// discord.py's interpreter, or `None` if this test has to be skipped.
fn python() -> Option<&'static Path> {
    static PYTHON: OnceLock<Option<PathBuf>> = OnceLock::new();
    let install = || {
        let folder = installed("python");
        fs::create_dir_all(&folder).unwrap();
        let requirements = clients().join("requirements.txt");
        let interpreter = folder.join("bin/python");
        once(&folder, std::slice::from_ref(&requirements), || {
            run("python3", &["-m", "venv", "--clear", "."], &folder)?;
            let list = requirements.to_str().unwrap();
            let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement", list];
            run(interpreter.to_str().unwrap(), &pip, &folder)
        })?;
        Some(interpreter)
    };
    PYTHON.get_or_init(install).as_deref()
}

/// Installs unless what was installed last came from the same lists; `None` when it cannot and need not.
fn once(folder: &Path, lists: &[PathBuf], install: impl FnOnce() -> Result<(), String>) -> Option<()> {
    let wanted: String = lists.iter().map(|list| fs::read_to_string(list).unwrap()).collect();
    let stamp = folder.join("installed");
    if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
        return Some(());
    }
    match install() {
        Ok(()) => {
            fs::write(&stamp, wanted).unwrap();
            Some(())
        }
        Err(error) => {
            #[expect(clippy::disallowed_methods, reason = "not a setting of the daemon")]
            let required = std::env::var_os("CI").is_some();
            assert!(!required, "the libraries cannot be installed: {error}");
            eprintln!("SKIPPED: the libraries cannot be installed: {error}");
            None
        }
    }
}

fn run(program: &str, arguments: &[&str], folder: &Path) -> Result<(), String> {
    let output = std::process::Command::new(program).args(arguments).current_dir(folder).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program}: {}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)))
}

/// A client script under its interpreter, with what it needs to know.
fn client(interpreter: &Path, script: &Path, api: &str) -> Command {
    let mut command = Command::new(interpreter);
    command.arg(script).env("NIRN_API", api).env("NIRN_TOKEN", TOKEN).env("PYTHONDONTWRITEBYTECODE", "1");
    // The proxy is at hand: whatever this machine uses to reach the world is in the way.
    for variable in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
        command.env_remove(variable);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

async fn finished(child: Child) -> Output {
    let output = timeout(Duration::from_secs(180), child.wait_with_output()).await;
    let output = output.expect("a client finishes in time").unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "a client failed:\n{out}{err}");
    output
}

/// Everything a library can do, and what of it reached Discord.
async fn library(interpreter: &Path, script: &Path) {
    let _alone = MACHINE.lock().await;
    let discord = discord().await;
    let proxy = Proxy::start(&discord, &[]).await;
    let hasty = Proxy::start(&discord, &[("QUEUE_TIMEOUT", "2000"), ("REQUEST_TIMEOUT", "1800")]).await;
    let mut command = client(interpreter, script, &proxy.api);
    command.env("NIRN_HASTY_API", &hasty.api).env("NIRN_WRONG_TOKEN", WRONG_TOKEN);
    finished(command.env("NIRN_INTERACTION_TOKEN", INTERACTION_TOKEN).spawn().unwrap()).await;

    let arrivals = discord.arrivals();
    let targets: Vec<String> = arrivals.iter().map(|arrival| arrival.target_text()).collect();
    for emoji in ["%F0%9F%91%8D", "1%EF%B8%8F%E2%83%A3"] {
        let reaction = format!("/reactions/{emoji}/@me");
        assert!(targets.iter().any(|target| target.contains(&reaction)), "no {reaction} in {targets:#?}");
    }
    // One library leaves blanks as they are, the other encodes them: either way they arrive as they were sent.
    let reason = "na%C3%AFve Gr%C3%BCnde %E2%80%93 %E7%90%86%E7%94%B1 %F0%9F%91%8D";
    let reasons: Vec<&[u8]> = arrivals.iter().filter_map(|arrival| arrival.header("X-Audit-Log-Reason")).collect();
    assert!(!reasons.is_empty(), "no audit-log reason arrived");
    for found in reasons {
        assert_eq!(String::from_utf8_lossy(found).replace("%20", " "), reason);
    }
    assert!(targets.iter().any(|target| target.contains("/callback")), "no interaction was answered");
    let counts = discord.counts();
    assert_eq!((counts.limited(), counts.verdict("invalid_401")), (0, 1), "{}", counts.to_json());
    drop((proxy.process, hasty.process));
}

#[tokio::test(flavor = "multi_thread")]
async fn discord_js_works_through_the_proxy() {
    let Some(folder) = node() else { return };
    library(Path::new("node"), &folder.join("library.mjs")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn discord_py_works_through_the_proxy() {
    let Some(interpreter) = python() else { return };
    library(interpreter, &clients().join("library.py")).await;
}

/// The arrivals around the first 429, in ms after the first of all.
fn around(arrivals: &[Arrival]) -> String {
    let refused = arrivals.iter().position(|arrival| arrival.status == 429).unwrap_or_default();
    let shown = arrivals.iter().take(refused + 5).skip(refused.saturating_sub(60));
    let told = |arrival: &Arrival| format!("{} at {}", arrival.status, (arrival.at - arrivals[0].at).as_millis());
    shown.map(told).collect::<Vec<_>>().join(", ")
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_processes_share_one_token_without_a_429() {
    let (Some(folder), Some(interpreter)) = (node(), python()) else { return };
    let _alone = MACHINE.lock().await;
    let discord = discord().await;
    let proxy = Proxy::start(&discord, &[]).await;
    let mut processes: Vec<Child> = (0..8)
        .map(|number| {
            let mut command = match number % 2 {
                0 => client(Path::new("node"), &folder.join("storm.mjs"), &proxy.api),
                _ => client(interpreter, &clients().join("storm.py"), &proxy.api),
            };
            command.env("NIRN_PROCESS", number.to_string()).stdin(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    // The interpreters' start keeps the machine busy for seconds: what is asked here is what the proxy does afterwards.
    for process in &mut processes {
        let mut ready = [0; "ready\n".len()];
        let told = process.stdout.as_mut().unwrap().read_exact(&mut ready);
        timeout(Duration::from_secs(120), told).await.expect("a client starts in time").unwrap();
    }
    for process in &mut processes {
        drop(process.stdin.take());
    }
    for process in processes {
        finished(process).await;
    }
    let counts = discord.counts();
    assert_eq!((counts.limited(), counts.status(0)), (0, 0), "{}\n{}", counts.to_json(), around(&discord.arrivals()));
    let messages = discord.arrivals_at("POST", "/channels/{}/messages");
    let shared = discord.arrivals_at("POST", &format!("/channels/{SHARED_CHANNEL}/messages"));
    let allowed = |arrivals: &[Arrival]| arrivals.iter().filter(|arrival| arrival.status == 200).count();
    assert_eq!((allowed(&messages), allowed(&shared)), (8 * 104, 8 * 4));
}
