package testenv

import (
	"errors"
	"io"
	"net"
	"net/url"
	"os"
	"sync"
	"testing"
	"time"
)

func TestProxyPassesDataUntouched(t *testing.T) {
	p := NewProxy(t, echo(t))
	c := dial(t, p)
	say(t, c, "hello")
	hear(t, c, "hello")
}

func TestProxyCutResetsAndLetsNewConnectionsIn(t *testing.T) {
	p := NewProxy(t, echo(t))
	c := dial(t, p)
	say(t, c, "a")
	hear(t, c, "a")
	p.Cut()
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read after Cut: %v, want the connection gone", err)
	}
	again := dial(t, p)
	say(t, again, "b")
	hear(t, again, "b")
}

func TestProxyRefuseEndsWithResume(t *testing.T) {
	p := NewProxy(t, echo(t))
	p.Refuse()
	u, _ := url.Parse(p.URL)
	if c, err := net.Dial("tcp", u.Host); err == nil { // else the reset came before the dialler looked
		defer func() { _ = c.Close() }()
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Error("a refused connection sends")
		}
	}
	p.Resume()
	c := dial(t, p)
	say(t, c, "b")
	hear(t, c, "b")
}

func TestProxyStallLosesNothing(t *testing.T) {
	p := NewProxy(t, echo(t))
	c := dial(t, p)
	p.Stall(ToClient)
	say(t, c, "held")
	silent(t, c)
	p.Resume()
	hear(t, c, "held")
}

func TestProxyStallsAfterSoManyBytes(t *testing.T) {
	p := NewProxy(t, echo(t))
	c := dial(t, p)
	p.StallAfter(ToServer, 3)
	say(t, c, "abcdef")
	hear(t, c, "abc")
	silent(t, c)
	p.Resume()
	hear(t, c, "def")
}

// echo serves connections that send back what they get, and returns a URL for NewProxy.
func echo(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer func() { _ = c.Close() }()
				_, _ = io.Copy(c, c)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
	return "tcp://" + l.Addr().String()
}

func dial(t *testing.T, p *Proxy) net.Conn {
	t.Helper()
	u, err := url.Parse(p.URL)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", u.Host)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func say(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
}

func hear(t *testing.T, c net.Conn, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
		t.Fatalf("got %q, %v; want %q", got, err, want)
	}
}

func silent(t *testing.T, c net.Conn) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read %d bytes, %v; want none to come", n, err)
	}
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
}
