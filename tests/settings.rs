//! Settings, start and stop, as whoever runs the binary sees them.
#![expect(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::ffi::{OsStr, OsString};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nirn_proxy::config::table::{Accepts, VARIABLES, Variable};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, ChildStderr, Command};
use tokio::time::{sleep, timeout};

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// The binary in a folder of its own, with these variables and no others.
fn command<K: AsRef<OsStr>, V: AsRef<OsStr>>(folder: &Path, vars: impl IntoIterator<Item = (K, V)>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nirn-proxy"));
    command.env_clear().envs(vars).current_dir(folder).stdin(Stdio::null()).kill_on_drop(true);
    command
}

async fn finish(command: &mut Command) -> Output {
    timeout(PATIENCE, command.output()).await.expect("the process does not end").unwrap()
}

/// Runs it with settings that stop the start, and gives the lines it says so in.
async fn refused<K: AsRef<OsStr>, V: AsRef<OsStr>>(vars: impl IntoIterator<Item = (K, V)>) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    problems(&finish(&mut command(folder.path(), vars)).await)
}

fn problems(output: &Output) -> Vec<String> {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(output.stdout.is_empty());
    text.lines().map(|line| line.strip_prefix("nirn-proxy: ").expect(line).to_owned()).collect()
}

/// A port nobody listens on just now. Below those the kernel gives out, so that nobody is given it meanwhile.
async fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let place = std::process::id().wrapping_mul(64).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = 10_000 + u16::try_from(place % 20_000).unwrap();
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.is_ok() {
            return port;
        }
    }
}

/// A running daemon.
struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStderr>>,
    log: Vec<String>,
    port: u16,
    _folder: TempDir,
}

impl Running {
    /// Starts it on a free port and waits until it is ready. `env_file` is the content of its `.env`.
    async fn start(vars: &[(&str, &str)], env_file: Option<&str>) -> Self {
        loop {
            let port = free_port().await;
            let folder = tempfile::tempdir().unwrap();
            if let Some(content) = env_file {
                fs::write(folder.path().join(".env"), content).unwrap();
            }
            let mut command = command(folder.path(), vars.iter().copied());
            let own = |name: &str, value: String, command: &mut Command| {
                if !vars.iter().any(|(given, _)| *given == name) {
                    command.env(name, value);
                }
            };
            own("BIND_IP", "127.0.0.1".into(), &mut command);
            own("ENABLE_METRICS", "false".into(), &mut command);
            own("PORT", port.to_string(), &mut command);
            let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
            let lines = BufReader::new(child.stderr.take().unwrap()).lines();
            let mut running = Self { child, lines, log: Vec::new(), port, _folder: folder };
            if running.wait_for("nirn-proxy is ready").await {
                return running;
            }
            // Somebody else took the port meanwhile.
            assert!(running.log.iter().any(|line| line.contains("in use")), "{:?}", running.log);
        }
    }

    /// Reads the log up to a line that holds `text`; false if it ends before.
    async fn wait_for(&mut self, text: &str) -> bool {
        while let Some(line) = timeout(PATIENCE, self.lines.next_line()).await.expect(text).unwrap() {
            self.log.push(line);
            if self.log.last().unwrap().contains(text) {
                return true;
            }
        }
        false
    }

    async fn signal(&self, name: &str) {
        let pid = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().await.unwrap().success());
    }

    /// Waits for its end, and gives its exit code and its whole log.
    async fn end(mut self) -> (Option<i32>, Vec<String>) {
        self.wait_for("\0").await;
        let status = timeout(PATIENCE, self.child.wait()).await.expect("the process does not end").unwrap();
        (status.code(), self.log)
    }

    fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// The status line of the answer to a request with these further header lines.
    async fn ask(&self, target: &str, headers: &str) -> String {
        let mut stream = self.send(target, headers).await;
        let mut answer = Vec::new();
        timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect(target).unwrap();
        String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_owned()
    }

    async fn send(&self, target: &str, headers: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address()).await.unwrap();
        let request = format!("GET {target} HTTP/1.1\r\nHost: proxy\r\nConnection: close\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }
}

/// Values that a variable does not accept; none where everything goes.
fn bad_values(variable: &Variable) -> Vec<String> {
    match variable.accepts {
        Accepts::Number { min: 0, max } => vec!["-1".to_owned(), (max + 1).to_string(), "ten".to_owned()],
        Accepts::Number { min, max } | Accepts::Milliseconds { min, max } => {
            vec![(min - 1).to_string(), (max + 1).to_string(), "1.5".to_owned()]
        }
        Accepts::Bool => vec!["yes".to_owned(), "2".to_owned()],
        Accepts::OneOf(_) => vec!["loud".to_owned()],
        Accepts::Text("anything" | "path of a PEM file") => Vec::new(),
        Accepts::Text(_) if variable.name == "NO_PROXY" => Vec::new(),
        Accepts::Text(_) => vec!["not this one".to_owned()],
    }
}

#[tokio::test]
async fn every_bad_value_stops_the_start_with_a_line_that_names_its_variable() {
    for round in 0..3 {
        let bad: Vec<(&Variable, String)> = VARIABLES
            .iter()
            .filter_map(|variable| Some((variable, bad_values(variable).into_iter().nth(round)?)))
            .collect();
        let lines = refused(bad.iter().map(|(variable, value)| (variable.name, value))).await;
        for (variable, value) in &bad {
            let start = format!("{} accepts ", variable.name);
            let own: Vec<_> = lines.iter().filter(|line| line.starts_with(&start)).collect();
            assert_eq!(own.len(), 1, "{start}{lines:?}");
            let shown = !variable.secret && variable.name != "BOT_RATELIMIT_OVERRIDES";
            assert_eq!(own[0].contains(value.as_str()), shown, "{own:?}");
        }
        // A broken list of members still asks for a cluster, and its three files are missing.
        let missing = lines.iter().filter(|line| line.contains("_FILE is required in a cluster")).count();
        assert_eq!((lines.len(), missing), (bad.len() + missing, if round == 0 { 3 } else { 0 }), "{lines:?}");
    }
}

#[tokio::test]
async fn all_problems_are_told_at_once() {
    let lines =
        refused([("PORT", "0"), ("LOG_LEVEL", "loud"), ("REQUEST_TIMEOUT", "5s"), ("OUTBOUND_IP", "here")]).await;
    assert_eq!(lines.len(), 4, "{lines:?}");
}

#[tokio::test]
async fn secrets_are_never_printed() {
    let lines = refused([
        ("CLUSTER_MEMBERS", "10.0.0.1"),
        ("CLUSTER_SECRET", "hunter2"),
        ("HTTPS_PROXY", "ftp://me:hunter2@proxy"),
        ("HTTP_PROXY", "http://me:hunter2@proxy:99999"),
        ("DISCORD_API_URL", "https://me:hunter2@discord.com"),
        ("BOT_RATELIMIT_OVERRIDES", "MTIz.hunter2.hunter2:50"),
    ])
    .await;
    assert_eq!(lines.len(), 8, "{lines:?}");
    assert!(lines.iter().all(|line| !line.contains("hunter2")), "{lines:?}");
}

#[tokio::test]
async fn text_that_is_not_utf_8_matters_in_known_variables_only() {
    let broken = || OsString::from_vec(vec![b'x', 0xff]);
    let lines = refused([("PORT".into(), broken()), (OsString::from("OTHER"), broken())]).await;
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("PORT accepts ") && lines[0].contains("UTF-8"), "{lines:?}");
}

#[tokio::test]
async fn a_dot_env_file_is_read_and_real_variables_win_over_it() {
    let env_file =
        "# settings\nMAX_QUEUE_DEPTH=5\nREQUEST_TIMEOUT='1234'\nexport QUEUE_TIMEOUT=\"4321\"\nBUFFER_SIZE=1\n";
    let running = Running::start(&[("QUEUE_TIMEOUT", "9999"), ("BUFFER_SIZE", "")], Some(env_file)).await;
    let ready = running.log.last().unwrap();
    assert!(ready.contains("request_timeout_ms=1234") && ready.contains("queue_timeout_ms=9999"), "{ready}");
    assert_eq!(running.log.len(), 1, "an empty variable wins as well: {:?}", running.log);
}

#[tokio::test]
async fn a_broken_dot_env_file_stops_the_start_without_being_printed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(".env");
    let no_vars: [(&str, &str); 0] = [];
    fs::write(&path, "PORT=8080\n# fine\nTOKEN hunter2\n").unwrap();
    let lines = problems(&finish(&mut command(folder.path(), no_vars)).await);
    assert!(lines.len() == 1 && lines[0].starts_with(".env ") && lines[0].ends_with("line 3"), "{lines:?}");
    assert!(!lines[0].contains("hunter2"));

    fs::write(&path, b"TOKEN=hunter2\xff").unwrap();
    let lines = problems(&finish(&mut command(folder.path(), no_vars)).await);
    assert!(lines.len() == 1 && lines[0].starts_with(".env ") && !lines[0].contains("hunter2"), "{lines:?}");

    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let lines = problems(&finish(&mut command(folder.path(), no_vars)).await);
    assert!(lines.len() == 1 && lines[0].starts_with(".env cannot be read"), "{lines:?}");

    fs::remove_dir(&path).unwrap();
    fs::write(&path, "PORT=0\n").unwrap();
    let lines = problems(&finish(&mut command(folder.path(), no_vars)).await);
    assert!(lines.len() == 1 && lines[0].starts_with("PORT accepts "), "{lines:?}");
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = taken.local_addr().unwrap();
    for variable in ["PORT", "METRICS_PORT", "PPROF_PORT"] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = command(folder.path(), [("BIND_IP", "127.0.0.1"), ("ENABLE_PPROF", "1")]);
        for name in ["PORT", "METRICS_PORT", "PPROF_PORT"] {
            command.env(name, free_port().await.to_string());
        }
        command.env(variable, address.port().to_string());
        let output = finish(&mut command).await;
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        let named =
            text.lines().filter(|line| line.contains(&format!(" {variable}: ")) && line.contains(&address.to_string()));
        assert_eq!(named.count(), 1, "{text}");
        assert!(!text.contains("is ready"), "{text}");
    }
}

#[tokio::test]
async fn one_line_says_what_is_in_force() {
    let vars = [
        ("DISCORD_API_URL", "http://127.0.0.1:9"),
        ("REQUEST_TIMEOUT", "1500"),
        ("BOT_RATELIMIT_OVERRIDES", "1:2, 2:3"),
        ("LOG_FORMAT", "json"),
        ("DISABLE_GLOBAL_RATELIMIT_DETECTION", "true"),
    ];
    let running = Running::start(&vars, None).await;
    let records: Vec<serde_json::Value> =
        running.log.iter().map(|line| serde_json::from_str(line).expect(line)).collect();
    let [warning, ready] = &records[..] else { panic!("{records:?}") };
    assert_eq!(warning["level"], "WARN");
    assert!(warning["message"].as_str().unwrap().contains("DISABLE_GLOBAL_RATELIMIT_DETECTION"));
    let expected = serde_json::json!({
        "level": "INFO",
        "version": env!("CARGO_PKG_VERSION"),
        "proxy": running.address().to_string(),
        "metrics": "off",
        "pprof": "off",
        "upstream": "http://127.0.0.1:9",
        "request_timeout_ms": 1500,
        "queue_timeout_ms": 60000,
        "cluster": "off",
        "overrides": 2,
    });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&ready[name], value, "{name} in {ready}");
    }
}

#[tokio::test]
async fn a_host_name_can_be_bound() {
    let running = Running::start(&[("BIND_IP", "localhost")], None).await;
    assert_eq!(running.ask("/nirn/healthz", "").await, "HTTP/1.1 200 OK");
    let lines = refused([("BIND_IP", "nowhere.invalid")]).await;
    assert!(lines.len() == 1 && lines[0].starts_with("BIND_IP accepts "), "{lines:?}");
}

#[tokio::test]
async fn a_health_check_needs_no_shell() {
    let running = Running::start(&[], None).await;
    let folder = tempfile::tempdir().unwrap();
    let check = async |port: u16| {
        let vars = [("BIND_IP", "127.0.0.1"), ("PORT", &port.to_string())];
        finish(command(folder.path(), vars).arg("--healthcheck")).await
    };
    let healthy = check(running.port).await;
    assert_eq!((healthy.status.code(), &healthy.stdout[..]), (Some(0), &b"healthy\n"[..]));
    let lines = problems(&check(free_port().await).await);
    assert!(lines.len() == 1 && lines[0].contains("/nirn/healthz"), "{lines:?}");
    let lines = problems(&finish(command(folder.path(), [("PORT", "x")]).arg("--healthcheck")).await);
    assert!(lines.len() == 1 && lines[0].starts_with("PORT accepts "), "{lines:?}");
}

#[tokio::test]
async fn arguments_are_few() {
    let folder = tempfile::tempdir().unwrap();
    let no_vars: [(&str, &str); 0] = [];
    let version = finish(command(folder.path(), no_vars).arg("--version")).await;
    assert_eq!(String::from_utf8(version.stdout).unwrap(), format!("nirn-proxy {}\n", env!("CARGO_PKG_VERSION")));
    let help = finish(command(folder.path(), no_vars).arg("--help")).await;
    assert!(help.status.success() && String::from_utf8(help.stdout).unwrap().contains("--healthcheck"));
    for arguments in [&["--port"][..], &["--version", "--help"], &["serve"]] {
        let output = finish(command(folder.path(), no_vars).args(arguments)).await;
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(String::from_utf8(output.stderr).unwrap().contains("unknown argument"));
    }
}

#[tokio::test]
async fn a_stop_signal_ends_an_idle_daemon_with_exit_code_0() {
    for name in ["TERM", "INT"] {
        let running = Running::start(&[], None).await;
        running.signal(name).await;
        let (code, log) = running.end().await;
        assert_eq!(code, Some(0), "{log:?}");
        assert!(log.iter().any(|line| line.contains("draining")), "{log:?}");
    }
}

#[tokio::test]
async fn a_second_signal_stops_at_once_unless_it_is_the_same_one_twice() {
    // It accepts and never answers.
    let discord = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let url = format!("http://{}", discord.local_addr().unwrap());
    let mut running = Running::start(&[("DISCORD_API_URL", &url), ("REQUEST_TIMEOUT", "60000")], None).await;
    let _waiting = running.send("/api/v10/gateway", "").await;
    let _attempt = timeout(PATIENCE, discord.accept()).await.expect("no attempt").unwrap();

    let started = Instant::now();
    running.signal("TERM").await;
    assert!(running.wait_for("draining").await);
    running.signal("INT").await;
    assert_eq!(running.ask("/nirn/healthz", "").await, "HTTP/1.1 503 Service Unavailable");
    assert_eq!(running.ask("/api/v10/gateway", "").await, "HTTP/1.1 503 Service Unavailable");
    sleep(Duration::from_millis(1100)).await;
    assert!(running.child.try_wait().unwrap().is_none(), "two signals within a second are one");
    running.signal("TERM").await;
    let (code, log) = running.end().await;
    assert_eq!(code, Some(0), "{log:?}");
    assert!(started.elapsed() < Duration::from_secs(14), "it waited for the drain's time to be up");
}

#[tokio::test]
async fn no_log_at_any_level_holds_what_clients_send() {
    let discord = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let url = format!("http://{}", discord.local_addr().unwrap());
    for format in ["text", "json"] {
        let running =
            Running::start(&[("LOG_LEVEL", "trace"), ("LOG_FORMAT", format), ("DISCORD_API_URL", &url)], None).await;
        // An answer that is none, so that every layer has something to complain about.
        let targets =
            ["/api/v10/webhooks/80351110224678912/hunter2?wait=hunter2", "/api/v10/users/@me?hunter2=hunter2"];
        for target in targets {
            let asked = running.ask(target, "Authorization: Bot hunter2\r\nX-Audit-Log-Reason: hunter2\r\n");
            let answered = async {
                let (mut stream, _) = discord.accept().await.unwrap();
                let mut head = [0; 4096];
                assert!(stream.read(&mut head).await.unwrap() > 0);
                stream.write_all(b"hunter2 is not HTTP hunter2\r\n\r\n").await.unwrap();
            };
            let (status, ()) = tokio::join!(asked, answered);
            assert_eq!(status, "HTTP/1.1 502 Bad Gateway");
        }
        running.signal("TERM").await;
        let (code, log) = running.end().await;
        assert_eq!(code, Some(0), "{log:?}");
        assert!(log.iter().any(|line| line.contains("upstream_error")), "{log:?}");
        assert!(log.iter().all(|line| !line.contains("hunter2")), "{log:?}");
    }
}
