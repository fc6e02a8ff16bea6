// Filters the cards of a paper's statements by verdict, and follows links to a card that is hidden.
document.addEventListener("DOMContentLoaded", () => {
  const bar = document.querySelector(".claim-filter");
  if (!bar) return;
  const cards = [...document.querySelectorAll(".claim")];
  const show = () => {
    const on = [...bar.querySelectorAll(".on")].map((button) => button.dataset.verdict);
    cards.forEach((card) => (card.hidden = on.length > 0 && !on.includes(card.dataset.verdict)));
  };
  bar.addEventListener("click", (event) => {
    if (event.target.dataset.verdict) {
      event.target.classList.toggle("on");
      show();
    }
  });
  const target = () => {
    const card = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (card) {
      card.hidden = false;
      card.scrollIntoView();
    }
  };
  window.addEventListener("hashchange", target);
  target();
});
